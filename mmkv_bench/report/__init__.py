"""A report of rows that opens in a browser, offline: static pages, data in scripts, charts and tables by libraries.

Entry point: `making.make`. It loads no model. Pages and their scripts lie in `pages/`; what they show is written beside them as
scripts (`folder.Folder.script`), since a page that was opened by a double click may read nothing else.
"""
