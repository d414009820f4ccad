"""SQL index of jobs, runs, steps and pins. It can be rebuilt from the files of the jobs."""
