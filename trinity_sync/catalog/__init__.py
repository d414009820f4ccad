"""The SQL index of jobs, runs, steps and claims. Files are the truth; it can be made from them."""
