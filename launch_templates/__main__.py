"""`python -m launch_templates`: the command launch-template."""

from launch_templates.cli import main

if __name__ == "__main__":
    main()
