//! Windows of C callers: handles that a hit resolves without a lock, and memory that goes when nobody can be using it.
//!
//! An open window is an [`Entry`] behind a pointer. [`get`] gives a reference to it to whoever has a claim (`leases.rs`); [`close`] makes the handle stale at
//! once, and the entry goes at once if no claim names it, else when one of the next calls that come here finds that none does any more.
//!
//! # Safety
//! The unsafe here is the pointer, and the one beside it to the window that the entry keeps. An entry is made from a `Box` by [`open`], read only under a claim
//! on its place and while the place's word says that it is open or the claim is older than its closing, and turned back into the `Box` by [`reap`], which
//! runs after the place was closed and only when no claim names it. That the reader's claim and the closer's mark cannot miss each other is shown in
//! `words.rs`. A claim taken after the mark finds the place closed and does not read the pointers.

#![allow(unsafe_code)]

use core::ptr;
use core::sync::atomic::AtomicPtr;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cuda_ipc_cache::{Opened, Window};
use cuda_ipc_core::rkey::Rkey;

use crate::blocks::Blocks;
use crate::context::Context;
use crate::failure::Failure;
use crate::handle::{Id, Kind, PLACES, STALE, UNKNOWN};
use crate::leases::{self, Claim};
use crate::status::CUDA_IPC_ERR_TOO_MANY_HANDLES;
use crate::words::OpenWord;

/// An open window.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) context: Arc<Context>,
    /// What it shows.
    pub(crate) opened: Opened,
    /// What it was opened by.
    pub(crate) rkey: Rkey,
}

/// A place for a window: half a cache line, which is all that a hit reads before it is in the cache's own window.
#[derive(Debug)]
#[repr(align(32))]
struct Place {
    word: OpenWord,
    entry: AtomicPtr<Entry>,
    /// The window in the entry; null if that shows memory which stays at its place.
    window: AtomicPtr<Window>,
}

static PLACES_OF_WINDOWS: Blocks<Place> = Blocks::new();
static BOOKS: Mutex<Books> = Mutex::new(Books { free: Vec::new(), closed: Vec::new(), used: 0 });

/// What only writers need.
#[derive(Debug)]
struct Books {
    /// Places that were used and are not.
    free: Vec<u32>,
    /// Places that are closed and still have their entries.
    closed: Vec<u32>,
    /// Places that were ever used.
    used: u32,
}

/// Opens a window; its handle.
///
/// Errors: more windows than there are places; `CUDA_IPC_ERR_STALE_HANDLE` if the context has been destroyed meanwhile.
pub(crate) fn open(entry: Entry) -> Result<u64, Failure> {
    let entry = Box::new(entry);
    let mut books = lock();
    let gone = reap(&mut books);
    // Under the lock, which the closing of all windows of a context takes after it has said so.
    let taken = if entry.context.is_destroyed() { Err(Failure::plain(STALE)) } else { take_place(&mut books) };
    let opened = taken.map(|(at, place)| {
        let window = entry.opened.window().map_or(ptr::null(), Arc::as_ptr);
        place.window.store(window.cast_mut(), Release);
        place.entry.store(Box::into_raw(entry), Release);
        Id { place: at, generation: place.word.open() }.encode(Kind::Window)
    });
    drop(books);
    drop(gone);
    opened
}

fn take_place(books: &mut Books) -> Result<(u32, &'static Place), Failure> {
    let full = Failure::plain(CUDA_IPC_ERR_TOO_MANY_HANDLES);
    let at = match books.free.pop() {
        Some(at) => at,
        None => {
            let new = || Place { word: OpenWord::new(), entry: AtomicPtr::new(ptr::null_mut()), window: AtomicPtr::new(ptr::null_mut()) };
            if books.used == PLACES_OF_WINDOWS.len() && !PLACES_OF_WINDOWS.grow(books.used, PLACES, new) {
                return Err(full);
            }
            books.used += 1;
            books.used - 1
        }
    };
    Ok((at, PLACES_OF_WINDOWS.get(at).ok_or(full)?))
}

/// A window as a lease needs it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum View<'c> {
    /// Another process's reservation.
    Mirror(&'c Window),
    /// Memory that is at one place for as long as its window is: that of this process, or of a legacy handle.
    Fixed {
        /// First address in the exporter.
        base: u64,
        /// Length in bytes.
        len: u64,
        /// First address here.
        local: u64,
    },
}

/// The entry of a handle, if it is open, for as long as `claim` lives.
pub(crate) fn get(claim: &Claim, id: Id) -> Result<&Entry, Failure> {
    let place = open_place(claim, id)?;
    // SAFETY: the claim names this place and the place was open after it was made, so nobody frees the entry before the claim is gone. The pointer was
    // stored before the place was opened.
    Ok(unsafe { &*place.entry.load(Acquire) })
}

/// As [`get`], without a look at the entry.
#[inline]
pub(crate) fn view(claim: &Claim, id: Id) -> Result<View<'_>, Failure> {
    let place = open_place(claim, id)?;
    // SAFETY: as in `get`; the window is the entry's, which keeps it.
    match unsafe { place.window.load(Acquire).as_ref() } {
        Some(window) => Ok(View::Mirror(window)),
        None => {
            let (base, len, local) = get(claim, id)?.opened.fixed().ok_or(UNKNOWN)?;
            Ok(View::Fixed { base, len, local })
        }
    }
}

#[inline]
fn open_place(claim: &Claim, id: Id) -> Result<&'static Place, Failure> {
    let place = PLACES_OF_WINDOWS.get(id.place).ok_or(UNKNOWN)?;
    // After the claim: see `words.rs`.
    if !place.word.is_open(id.generation) || claim.window() != id.place {
        return Err(Failure::plain(STALE));
    }
    Ok(place)
}

/// The cache's window of a lease that is being ended, open or closed; `None` if it is of memory that stays at its place.
#[inline]
pub(crate) fn of_lease(claim: &Claim) -> Option<&Window> {
    let place = PLACES_OF_WINDOWS.get(claim.window())?;
    // SAFETY: the claim was made before its lease was published, which `view` had to find open for; it has stood since, so the entry has too, and the entry
    // keeps the window.
    unsafe { place.window.load(Acquire).as_ref() }
}

/// Whether the place at `at` shows this window of the cache, as other handles may: it has one for each reservation and access. Meant for places that a live lease
/// names, where the pointer stays; it is compared only.
pub(crate) fn shows(at: u32, window: &Window) -> bool {
    PLACES_OF_WINDOWS.get(at).is_some_and(|place| ptr::eq(place.window.load(Acquire), window))
}

/// Whether a closed window waits for this claim, as it seems: then [`clear`] is worth the lock.
#[inline]
pub(crate) fn is_closed(claim: &Claim) -> bool {
    PLACES_OF_WINDOWS.get(claim.window()).is_some_and(|place| !place.word.seems_open())
}

/// Closes a window: its handle is stale from here on. Leases of it go on.
pub(crate) fn close(id: Id) -> Result<(), Failure> {
    let gone = {
        let mut books = lock();
        let place = PLACES_OF_WINDOWS.get(id.place).filter(|_| id.place < books.used).ok_or(UNKNOWN)?;
        if !place.word.is_open(id.generation) {
            return Err(Failure::plain(STALE));
        }
        shut(&mut books, id.place, place);
        reap(&mut books)
    };
    // Dropping windows takes locks of the cache and driver calls; ours is released.
    drop(gone);
    Ok(())
}

/// Closes all windows of a context.
pub(crate) fn close_all_of(context: &Arc<Context>) {
    let gone = {
        let mut books = lock();
        for at in 0..books.used {
            let Some(place) = PLACES_OF_WINDOWS.get(at).filter(|place| place.word.seems_open()) else { continue };
            // SAFETY: open, so the entry is there, and only holders of the lock close or free.
            let entry = unsafe { place.entry.load(Acquire).as_ref() };
            if entry.is_some_and(|entry| Arc::ptr_eq(&entry.context, context)) {
                shut(&mut books, at, place);
            }
        }
        reap(&mut books)
    };
    drop(gone);
}

/// Gives back what closed windows have left, as far as no claim names it.
pub(crate) fn clear() {
    let gone = reap(&mut lock());
    drop(gone);
}

/// Open windows of a context, and closed ones of anybody that wait for leases.
pub(crate) fn count(context: &Arc<Context>) -> (u64, u64) {
    let books = lock();
    let mut open = 0;
    for place in (0..books.used).filter_map(|at| PLACES_OF_WINDOWS.get(at)).filter(|place| place.word.seems_open()) {
        // SAFETY: as in `close_all_of`.
        let entry = unsafe { place.entry.load(Acquire).as_ref() };
        open += u64::from(entry.is_some_and(|entry| Arc::ptr_eq(&entry.context, context)));
    }
    (open, books.closed.len() as u64)
}

fn shut(books: &mut Books, at: u32, place: &Place) {
    place.word.shut();
    books.closed.push(at);
}

/// Takes the entries of closed places that nobody claims.
#[must_use = "to be dropped without the lock"]
#[allow(clippy::vec_box, reason = "the boxes are there already")]
fn reap(books: &mut Books) -> Vec<Box<Entry>> {
    let mut gone = Vec::new();
    let Books { free, closed, .. } = books;
    closed.retain(|&at| {
        if leases::is_claimed(at) {
            return true;
        }
        let Some(place) = PLACES_OF_WINDOWS.get(at) else { return false };
        place.window.store(ptr::null_mut(), Relaxed);
        let entry = place.entry.swap(ptr::null_mut(), Acquire);
        if !entry.is_null() {
            // SAFETY: made by `open` from a box, and taken out here by the only one, who holds the lock. The place was closed before this look at all
            // claims, so whoever claims it later finds it closed.
            gone.push(unsafe { Box::from_raw(entry) });
        }
        place.word.turn();
        free.push(at);
        false
    });
    gone
}

fn lock() -> MutexGuard<'static, Books> {
    BOOKS.lock().unwrap_or_else(PoisonError::into_inner)
}
