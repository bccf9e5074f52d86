//! Which prefixes of texts are in some session's pages: a trie of token pages, keyed by the chain of hashes that leads to each.
//!
//! A page's key is the hash of its parent's key and its tokens. So a lookup walks a prompt page by page, whatever the number of
//! sessions, and within the first page that no session has whole it compares tokens: every length of shared prefix is found.

use crate::kernels::cache_append::PAGE_TOKENS;
use std::collections::HashMap;
use std::sync::Arc;

/// Key of a page: the first half of a BLAKE3 hash.
type Key = [u8; 16];

/// Key before the first page.
const ROOT: Key = [0; 16];

/// Who has a page.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Owner {
    /// A session on the device, by its number.
    Live(u64),
    /// A session in a store, by the store's number and its name.
    Stored(usize, String),
}

/// A prefix that someone has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hit {
    /// Who.
    pub owner: Owner,
    /// Tokens of it.
    pub tokens: usize,
}

#[derive(Debug)]
struct Entry {
    owner: Owner,
    tokens: Arc<[u32]>,
}

/// A page of an owner: the key before it, and its tokens.
type Owned = (Key, Arc<[u32]>);

/// The prefixes of all sessions that an engine knows.
#[derive(Debug, Default)]
pub struct PrefixIndex {
    /// Pages by the key of what comes before them.
    pages: HashMap<Key, Vec<Entry>>,
    /// Each owner's pages.
    owners: HashMap<Owner, Vec<Owned>>,
}

fn chain(parent: &Key, tokens: &[u32]) -> Key {
    let mut hasher = blake3::Hasher::new();
    hasher.update(parent).update(bytemuck::cast_slice(tokens));
    let mut key = ROOT;
    key.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    key
}

/// Leading tokens that two pages share.
fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

impl PrefixIndex {
    /// Tells that `owner` has `tokens` in its pages, and nothing else.
    pub fn set(&mut self, owner: &Owner, tokens: &[u32]) {
        let known = self.owners.get(owner).map_or(&[][..], Vec::as_slice);
        let same = known.iter().zip(tokens.chunks(PAGE_TOKENS)).take_while(|((_, a), b)| **a == **b).count();
        self.cut(owner, same);
        let list = self.owners.entry(owner.clone()).or_default();
        let mut key = list.last().map_or(ROOT, |(parent, tokens)| chain(parent, tokens));
        for page in tokens.chunks(PAGE_TOKENS).skip(same) {
            let page: Arc<[u32]> = page.into();
            self.pages.entry(key).or_default().push(Entry { owner: owner.clone(), tokens: page.clone() });
            list.push((key, page.clone()));
            key = chain(&key, &page);
        }
    }

    /// Forgets an owner.
    pub fn remove(&mut self, owner: &Owner) {
        self.cut(owner, 0);
        self.owners.remove(owner);
    }

    /// Forgets an owner's pages from number `first` on.
    fn cut(&mut self, owner: &Owner, first: usize) {
        let Some(list) = self.owners.get_mut(owner) else { return };
        for (key, _) in list.drain(first.min(list.len())..) {
            let entries = self.pages.get_mut(&key).expect("an owner's page is in the index");
            entries.retain(|entry| entry.owner != *owner);
            if entries.is_empty() {
                self.pages.remove(&key);
            }
        }
    }

    /// The longest prefix of `tokens` that somebody has; of several owners the first, and those on the device before those in a
    /// store.
    pub fn find(&self, tokens: &[u32]) -> Option<Hit> {
        let mut hit: Option<Hit> = None;
        let (mut key, mut at) = (ROOT, 0);
        loop {
            let rest = &tokens[at..];
            let entries = self.pages.get(&key).into_iter().flatten();
            let best = entries.map(|entry| (common(&entry.tokens, rest), &entry.owner));
            let Some((shared, owner)) = best.max_by(|a, b| a.0.cmp(&b.0).then(b.1.cmp(a.1))) else { return hit };
            if shared == 0 {
                return hit;
            }
            at += shared;
            hit = Some(Hit { owner: owner.clone(), tokens: at });
            if shared < PAGE_TOKENS {
                return hit;
            }
            key = chain(&key, &rest[..PAGE_TOKENS]);
        }
    }

    /// Owners that the index knows.
    pub fn owners(&self) -> usize {
        self.owners.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(seed: u32, len: usize) -> Vec<u32> {
        (0..len as u32).map(|i| (i ^ seed).wrapping_mul(2_654_435_761) % 1000).collect()
    }

    #[test]
    fn every_length_of_prefix_is_found() {
        let mut index = PrefixIndex::default();
        let (a, b) = (text(1, 700), text(2, 300));
        index.set(&Owner::Live(1), &a);
        index.set(&Owner::Live(2), &b);
        for shared in [1, 100, 127, 128, 129, 256, 500, 699, 700] {
            let mut prompt = a[..shared].to_vec();
            prompt.push(5000);
            assert_eq!(index.find(&prompt), Some(Hit { owner: Owner::Live(1), tokens: shared }), "{shared} shared");
        }
        assert_eq!(index.find(&b[..200]), Some(Hit { owner: Owner::Live(2), tokens: 200 }));
        assert_eq!(index.find(&[9999]), None);
        assert_eq!(index.find(&[]), None);
    }

    #[test]
    fn the_device_goes_before_the_store_and_a_longer_prefix_before_both() {
        let mut index = PrefixIndex::default();
        let stored = Owner::Stored(0, "notes".into());
        let a = text(1, 400);
        index.set(&stored, &a);
        index.set(&Owner::Live(7), &a[..200]);
        assert_eq!(index.find(&a[..150]).unwrap().owner, Owner::Live(7));
        assert_eq!(index.find(&a), Some(Hit { owner: stored.clone(), tokens: 400 }));
        index.remove(&stored);
        assert_eq!(index.find(&a), Some(Hit { owner: Owner::Live(7), tokens: 200 }));
    }

    #[test]
    fn what_was_cut_is_found_no_more() {
        let mut index = PrefixIndex::default();
        let (a, mut b) = (text(1, 400), text(1, 130));
        index.set(&Owner::Live(1), &a);
        b.extend(text(9, 200));
        index.set(&Owner::Live(1), &b);
        assert_eq!(index.find(&a).unwrap().tokens, 130);
        assert_eq!(index.find(&b).unwrap().tokens, 330);
        index.set(&Owner::Live(1), &[]);
        assert_eq!(index.find(&b), None);
        index.remove(&Owner::Live(1));
        assert_eq!((index.owners(), index.pages.len()), (0, 0));
    }
}
