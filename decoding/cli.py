"""`python -m decoding.cli`: the command line of a rank, started by torchrun or our launcher."""

from decoding.app.main import main

if __name__ == "__main__":
    main()
