"""From a call to the program that runs it: what is compiled anew, and what the ranks agree on before."""
