"""``osdp cluster``: the commands of the cluster planner.

Start at :mod:`osdp.cli.cluster.commands`.

- ``commands``: ``plan``, ``estimate`` and ``layers``
- ``request``: what ``plan`` and ``estimate`` are asked for
- ``goal``: what ``plan`` searches for
- ``outputs``: where answers go
- ``runnable``: ``osdp cluster plan --out``
- ``calibrate``: ``osdp cluster calibrate``
"""
