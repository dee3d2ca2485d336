"""Host lists as users write them. For ranktable and for msrun alike, so it imports no more than ranktable.errors."""
