/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Only the first fragment of a datagram has ports. The programs remember them for the other
 * fragments if the first one was translated. A fragment that comes before the first one, or too
 * late, is left alone. Ids are used again, so the first fragment of any datagram replaces the entry
 * of its id.
 */
#ifndef EBPFLB_PATH_FRAGMENT_H
#define EBPFLB_PATH_FRAGMENT_H

#include "maps.h"
#include "net/packet.h"

#define REASSEMBLY 30000000000ULL	/* ns; how long Linux waits for the rest (ipfrag_time) */

/* Fills an empty key. */
static __always_inline void fragment_key_write(struct fragment_key *key, const struct packet *packet)
{
	key->source = packet->tuple.source;
	key->destination = packet->tuple.destination;
	key->id = packet->id;
	key->protocol = packet->tuple.protocol;
	key->hook = packet->tuple.hook;
}

/* Remembers the ports. Call it with the tuple that a packet had before it was translated. */
static __always_inline void fragment_remember(const struct packet *packet, bool translated)
{
	EMPTY(struct fragment_key, key);
	EMPTY(struct fragment_ports, ports);

	fragment_key_write(key, packet);
	ports->seen = clock_coarse();
	ports->source_port = packet->tuple.source_port;
	ports->destination_port = packet->tuple.destination_port;
	if (translated)
		bpf_map_update_elem(MAP(fragments), key, ports, BPF_ANY);
	else
		bpf_map_delete_elem(MAP(fragments), key);
}

/* Completes the tuple of a later fragment, if its first one was translated. */
static __always_inline bool fragment_complete(struct packet *packet)
{
	EMPTY(struct fragment_key, key);
	struct fragment_ports *ports;

	fragment_key_write(key, packet);
	ports = LOOKUP(struct fragment_ports, fragments, key);
	if (!ports || clock_coarse() > ports->seen + REASSEMBLY)
		return false;
	packet->tuple.source_port = ports->source_port;
	packet->tuple.destination_port = ports->destination_port;
	return true;
}

#endif
