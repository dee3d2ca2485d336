"""`python -m msrun` is the `msrun` command."""

from msrun.agent.signals import hold_signals

if __name__ == "__main__":
    hold_signals()
    from msrun.cli import main

    main()
