"""Pages of figures and tables: of a sweep, and of a campaign."""
