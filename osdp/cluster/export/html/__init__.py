"""A cluster plan as one HTML file that needs no network.

Start at :func:`osdp.cluster.export.html.page.cluster_page`.

- ``page``: the page: its tabs and tables
- ``first_screen``: whether it fits, how fast it is, what it costs, what was decided and why
- ``charts``: data and layout of its charts, for plotly
"""
