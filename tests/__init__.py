"""The tests: one folder for each package of kvjax, and project/ for what is about all of it."""
