"""The report of a job: what its files, this node and the Prefect server know about it.

`collect` reads, `health` judges. `facts` has the values, from which the command renders the page
and prints JSON.
"""
