"""A report of rows that opens in a browser, offline: static pages whose charts and tables plotly and itables write.

Entry point: `build.build_report`. It loads no model. Templates, style sheet and script of the pages lie in `templates/`. A page
that was opened by a double click may read scripts and nothing else: charts that several pages show are scripts (`Folder.figure`).
"""
