"""`python -m decoding.cli`: the command line, as torchrun and our own launcher start it, a process
a rank.
"""

from decoding.app.main import main

if __name__ == "__main__":
    main()
