"""Pages on which a reader goes from a point to the trial behind it: one file for good, or served while a sweep trains.

What a page shows is plain data, made here; what draws it in a browser are the files in `browser/`, the same for both,
and plotly.js as the package `plotly` brings it. Every text is a stranger's: it reaches a page as data alone.
"""
