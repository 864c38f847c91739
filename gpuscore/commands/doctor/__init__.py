"""`gpuscore doctor`: checks of this machine, each with what to do about what was found."""
