"""The sub-commands of `ranktable`, one module each; a module holds a click command of its own name."""
