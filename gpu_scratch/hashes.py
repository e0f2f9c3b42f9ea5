from pathlib import Path
from fp8tune.revisions import source, git
from fp8tune_kernels import catalog
root = git.toplevel(Path.cwd())
with git.checkouts(root, (git.resolve(root, "248ee15"), None)) as folders:
    for k in catalog.KERNELS:
        hs = []
        for f in folders:
            try: hs.append(source.source_hash(k, source.in_folder(f, source.SOURCE_ROOTS)))
            except Exception as e: hs.append(str(e)[:50])
        if hs[0] != hs[1]: print(k, hs)
