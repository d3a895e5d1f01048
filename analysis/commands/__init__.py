"""The commands on results, one file each: `HELP`, `add_arguments(parser)` and `run(options)`. A file finds itself."""
