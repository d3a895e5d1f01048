"""The forecasters, one file each: what small models tell of larger ones. A file finds itself (`base.FORECASTERS`)."""
