"""How the processes of a job agree: messages, membership, the scheduler process and the rendezvous stores."""
