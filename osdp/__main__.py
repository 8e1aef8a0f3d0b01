"""``python -m osdp``: the ``osdp`` command, where scripts are not in the path."""

from osdp.cli.main import main

if __name__ == "__main__":
    main()
