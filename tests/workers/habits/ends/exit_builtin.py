print(exit, quit)
exit()
