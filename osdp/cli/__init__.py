"""The ``osdp`` command (extra ``cli``).

Start at :mod:`osdp.cli.main`.

- ``main``: parse, call one function, print
- ``models``: models by name, file, function or folder
- ``exclusive_options``: options that exclude each other
- ``cluster``: ``osdp plan --cluster`` and ``osdp estimate``
- ``outputs``: where answers go
- ``runnable``: ``osdp plan --cluster --out``
- ``calibrate``: ``osdp calibrate``
"""
