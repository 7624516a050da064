"""What every way to call attention promises, whichever way, call and processor: see README.md."""
