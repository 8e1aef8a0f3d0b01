"""A plan as one HTML file that needs no network.

Start at :func:`osdp.report.html.page.html_page`.

- ``page``: the page: its tabs and tables
- ``first_screen``: whether it fits, how fast it is, what was decided and why
- ``document``: what all pages share: the file, its tabs, tables and cards
- ``charts``: data and layout of its charts, for plotly
- ``page.css``: its looks, in the light and in the dark, on a phone too
- ``page.js``: its tabs, sorted tables and charts
"""
