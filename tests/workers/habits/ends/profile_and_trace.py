import cProfile
import io
import pstats
import sys


def work() -> int:
    return sum(range(10))


profile = cProfile.Profile()
profile.runcall(work)
out = io.StringIO()
pstats.Stats(profile, stream=out).print_stats()
print("work" in out.getvalue())
seen = []
sys.settrace(lambda frame, event, arg: seen.append(frame.f_code.co_name))
work()
sys.settrace(None)
print(seen)
