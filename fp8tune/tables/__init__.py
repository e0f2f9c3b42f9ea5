"""Launch tables: rows chosen from decided studies, generated modules, and files in the formats of others."""
