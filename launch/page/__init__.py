"""What all pages of Muster share: their look (templates/), the colours, drawings that a page carries within itself.

Imports launch.cli and launch.files alone. Pages are Jinja2 templates, everything in them is escaped; drawings are
Vega-Lite, which is part of each page that has any: a page opens without a network, in light and in dark.
Writes pages for people to read; no program reads them. Jinja2 and Vega-Lite are imported here alone, and this room only
where a page is written: other commands start without them.
"""
