import json

json.kept_open = open("kept.txt", "w")  # noqa: SIM115
json.kept_open.write("held by the standard library")
