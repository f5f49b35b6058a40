//! Loans: tensors that a peer reads in place.
//!
//! | file | |
//! |---|---|
//! | `lent` | the loans that this process has given on a link, and how each is returned |
//! | `borrowed` | the loans that this process holds of a peer |
//! | `orphans` | loans whose link ended before the borrower gave them back |
//! | `reclaim` | memory of dead processes of which something is still borrowed |

pub(crate) mod borrowed;
pub(crate) mod lent;
pub(crate) mod orphans;
pub(crate) mod reclaim;
