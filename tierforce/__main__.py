"""`python -m tierforce`: the command line."""

from decoding.app.main import main

if __name__ == "__main__":
    main()
