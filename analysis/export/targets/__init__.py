"""One file a target of `export --to NAME`; it finds itself, and imports its library when it is asked for."""
