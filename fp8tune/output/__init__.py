"""Everything that commands print: documents, tables, messages and progress."""
