"""What `import mindspore` finds where msrun.mindspore takes MindSpore's place: this package becomes that one."""

import msrun.mindspore
from msrun.mindspore.import_paths import pose_as_mindspore

pose_as_mindspore(msrun.mindspore.__name__)
