"""Results database: schema, reading, writing, importing and the work queue. Knows no GPU and no terminal."""
