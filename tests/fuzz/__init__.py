"""Random problems against the float64 textbook: `make fuzz`, or `python -m tests.fuzz --help`.

- problem.py: what a problem is, and the program of few lines that says it
- drawing.py, options.py: what is drawn
- textbook.py: what is exact
- bound.py: an analysis of rounding errors: how far off one may be
- check.py: runs a problem, holds its results to the bound, shrinks what fails
- relative.py: the bound of the suite, for a sample
- packed.py: packed sequences, pages and chunks against the bits of every sequence alone
- worker.py, __main__.py: processes, progress, tables
- same_bits.py: two builds, bit by bit
"""
