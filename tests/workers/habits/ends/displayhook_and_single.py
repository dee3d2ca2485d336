import code

console = code.InteractiveInterpreter({"__name__": "__main__"})
console.runsource("1 + 1")
exec(compile("2 + 2", "<x>", "single"))
