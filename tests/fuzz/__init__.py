"""Random problems against the float64 textbook: `make fuzz`, or `python -m tests.fuzz --help`.

- problem.py: what is drawn, and the program of few lines that says it
- bound.py: the textbook with an analysis of rounding errors: what is exact, how far off one may be
- check.py: runs a problem, holds its results to the bound, shrinks what fails
- relative.py: the bound of the suite, for a sample
- worker.py, __main__.py: processes, progress, table
"""
