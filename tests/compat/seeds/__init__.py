"""The rows of docs/compatibility.md: each runs on the original of a seed document and on attnlib.

`ROWS` is the table. A row is a function of a module (its probe): it runs on the seed's original, a
module that is written from the seed's text in plain torch and Python (`*_original.py`), and on the
module of attnlib that the row names. `test_rows.py` compares the results with what the row claims;
`docs/generate.py` writes the tables of the page from the rows.
"""
