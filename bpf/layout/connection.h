/* SPDX-License-Identifier: GPL-2.0 */
/* The open connections of services with SERVICE_LEAST_CONNECTIONS; a part of layout.h. */
#ifndef EBPFLB_LAYOUT_CONNECTION_H
#define EBPFLB_LAYOUT_CONNECTION_H

/*
 * An open flow of packets, or of a datagram socket, that is counted. Its key is an assignment_key:
 * of a datagram socket the one in assignments, of packets a number that no other flow has had
 * (struct flow), in place of the cookie. A stream socket's connection is counted by its entry in
 * sockets (counted).
 */
struct connection {
	__u32 backend;
	__u32 generation;	/* that the backend id had when it was opened */
};
SIZE(struct connection, 8);

/* By backend id. */
struct backend_load {
	__u32 open;		/* connections of this generation, in connections and sockets */
	__u32 generation;	/* grows when the id's backend is removed, and when another gets it */
	__u32 uncounted;	/* that were opened while the map was full, of all generations */
	__u32 pad;
};
SIZE(struct backend_load, 16);

#endif
