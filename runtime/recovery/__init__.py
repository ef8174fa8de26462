"""Bringing a run back, when ranks or nodes of it are lost.

what is decided     controller: what is done after a fault; forming, repair: one recovery; budget
                    ranks, members, roster, places: which rank is where
                    preparation: copies and standbys
                    watch, health, inquiry, faults: who does not get on, and what came first
                    resizing, sizes, growth: fewer ranks, and all of them again
                    succession, controller_process: a controller of its own, that can be lost
what a node does    one_node, cluster_node: a run on one, or one of several; node: its agent
                    pool, process, worker: its processes; channel: what it tells them
                    arenas, shelf, copier, transfer: snapshots in memory; rings; wire
what a rank does    link: hears and tells; images: takes state out of memory; sockets; journal
what is left        events, for the user
"""
