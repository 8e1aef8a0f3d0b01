"""``osdp cluster``: the commands of the cluster planner.

Start at :mod:`osdp.cli.cluster.commands`.

- ``commands``: ``plan``, ``estimate`` and ``layers``
- ``request``: model, cluster and layout of ``plan`` and ``estimate``
- ``goal``: objective and limits of ``plan``
- ``outputs``: output files of ``plan``
- ``runnable``: ``osdp cluster plan --out``
- ``exports``: ``osdp cluster plan --export``
- ``report``: ``osdp cluster plan --report``
- ``measure``: ``osdp cluster plan --measure`` and ``osdp cluster measure``
- ``calibrate``: ``osdp cluster calibrate``
"""
