"""``meshrun -m meshlib.notebook``: ranks that wait for a notebook (``notebook.attach``)."""

from meshlib.notebook._rank import main

if __name__ == "__main__":
    main()
