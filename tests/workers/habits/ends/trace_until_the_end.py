import sys

names = set()
sys.setprofile(lambda frame, event, arg: names.add(frame.f_code.co_name))


class Late:
    def __del__(self) -> None:
        print("run_main" in names, "_run_script" in names)


late = Late()
