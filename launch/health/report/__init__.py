"""How a check's document (launch.health.records.document) is shown: as a page, as pictures, and in the terminal.

Imports what launch.health may import; the look of the page is that of all pages (launch.page). Nothing is decided here:
launch.health has said what is slow or unequal.
Documents: build/<inventory>/checks/report.html and heatmap.svg, written by page.py and read by people alone.
"""
