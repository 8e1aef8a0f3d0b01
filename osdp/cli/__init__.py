"""The ``osdp`` command (extra ``cli``).

Start at :mod:`osdp.cli.main`.

- ``main``: parse, call one function, print
- ``planning``: plans made, shown, explained and compared
- ``described``: a model with its devices: a described folder, or a name and ``--devices``
- ``models``: models by name, file, function or folder
- ``options``: options of commands as fields of values
- ``doctor``: ``osdp doctor``: what is installed and usable
- ``checkpoint``: ``osdp checkpoint``: look into checkpoints, check them, export them
- ``cluster``: ``osdp cluster``, the commands of the cluster planner
"""
