import time

try:
    with open("ready", "w"):
        pass
    for _ in range(6000):
        time.sleep(0.01)
except KeyboardInterrupt:
    print("caught")
    with open("saved", "w") as file:
        file.write("step 7")
print("goes on")
