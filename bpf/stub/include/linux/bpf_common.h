/* SPDX-License-Identifier: GPL-2.0 */
/* Empty: BCC includes it, nothing of it is needed. */
