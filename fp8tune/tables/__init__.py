"""Launch tables: selection of rows from decided studies, generated modules, and formats for other tools."""
