"""`python -m quantkit`."""

from quantkit.cli.app import main

if __name__ == "__main__":
    main()
