"""Report of stored rows as static HTML pages for a browser offline, with charts by plotly and tables by itables.

Entry point: `build.build_report`. No model is loaded. `templates/` holds the templates, the style sheet and the script.
In these pages a cell is one setting: model, dataset, method, budget, protocol, reading and seed. A page opened from a
file can load scripts, but no data files. So a chart that several pages show is written as a script (`Folder.figure`).
"""
