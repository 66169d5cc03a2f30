//! Contexts and exports of C callers: handles behind a lock, since nobody asks for them often.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::failure::Failure;
use crate::handle::{Id, Kind, PLACES, STALE, UNKNOWN};
use crate::status::CUDA_IPC_ERR_TOO_MANY_HANDLES;
use crate::words::next_generation;

/// Objects by handle. No lock is held while an object is used or dropped.
#[derive(Debug)]
pub(crate) struct Table<T> {
    kind: Kind,
    inner: Mutex<Inner<T>>,
}

#[derive(Debug)]
struct Inner<T> {
    places: Vec<Place<T>>,
    free: Vec<u32>,
}

#[derive(Debug)]
struct Place<T> {
    generation: u64,
    object: Option<Arc<T>>,
}

impl<T> Table<T> {
    pub(crate) const fn new(kind: Kind) -> Self {
        Self { kind, inner: Mutex::new(Inner { places: Vec::new(), free: Vec::new() }) }
    }

    /// Adds an object; its handle.
    pub(crate) fn insert(&self, object: Arc<T>) -> Result<u64, Failure> {
        let mut inner = self.lock();
        let full = Failure::plain(CUDA_IPC_ERR_TOO_MANY_HANDLES);
        let at = match inner.free.pop() {
            Some(at) => at,
            None => {
                let at = u32::try_from(inner.places.len()).ok().filter(|&at| at < PLACES).ok_or(full)?;
                inner.places.push(Place { generation: 1, object: None });
                at
            }
        };
        let place = inner.places.get_mut(at as usize).ok_or(full)?;
        place.object = Some(object);
        Ok(Id { place: at, generation: place.generation }.encode(self.kind))
    }

    /// The object of a handle.
    pub(crate) fn get(&self, handle: u64) -> Result<Arc<T>, Failure> {
        let id = Id::decode(handle, self.kind)?;
        let inner = self.lock();
        let place = inner.places.get(id.place as usize).ok_or(UNKNOWN)?;
        match &place.object {
            Some(object) if place.generation == id.generation => Ok(object.clone()),
            _ => Err(Failure::plain(STALE)),
        }
    }

    /// Takes the object of a handle, which is stale from here on.
    pub(crate) fn remove(&self, handle: u64) -> Result<Arc<T>, Failure> {
        let id = Id::decode(handle, self.kind)?;
        let mut inner = self.lock();
        let place = inner.places.get(id.place as usize).ok_or(UNKNOWN)?;
        if place.generation != id.generation {
            return Err(Failure::plain(STALE));
        }
        inner.take(id.place).ok_or(Failure::plain(STALE))
    }

    /// Takes all objects that `wanted` picks.
    pub(crate) fn remove_all(&self, wanted: impl Fn(&T) -> bool) -> Vec<Arc<T>> {
        let mut inner = self.lock();
        let places = 0..u32::try_from(inner.places.len()).unwrap_or(u32::MAX);
        let picked: Vec<u32> =
            places.zip(&inner.places).filter(|(_, place)| place.object.as_deref().is_some_and(&wanted)).map(|(at, _)| at).collect();
        picked.into_iter().filter_map(|at| inner.take(at)).collect()
    }

    /// How many objects `wanted` picks.
    pub(crate) fn count(&self, wanted: impl Fn(&T) -> bool) -> u64 {
        self.lock().places.iter().filter(|place| place.object.as_deref().is_some_and(&wanted)).count() as u64
    }

    fn lock(&self) -> MutexGuard<'_, Inner<T>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Inner<T> {
    fn take(&mut self, at: u32) -> Option<Arc<T>> {
        let place = self.places.get_mut(at as usize)?;
        let object = place.object.take()?;
        place.generation = next_generation(place.generation);
        self.free.push(at);
        Some(object)
    }
}

#[cfg(test)]
mod tests {
    use super::Table;
    use crate::handle::Kind;
    use crate::status::{CUDA_IPC_ERR_HANDLE, CUDA_IPC_ERR_STALE_HANDLE};
    use std::sync::Arc;

    #[test]
    fn a_removed_object_is_stale_and_its_place_is_used_again() {
        let table = Table::new(Kind::Export);
        let (first, second) = (table.insert(Arc::new(1)).expect("room"), table.insert(Arc::new(2)).expect("room"));
        assert_eq!((*table.get(first).expect("there"), *table.get(second).expect("there")), (1, 2));
        assert_eq!(*table.remove(first).expect("there"), 1);
        let stale = |handle| table.get(handle).map(|_| ()).expect_err("stale").status;
        assert_eq!(stale(first), CUDA_IPC_ERR_STALE_HANDLE);
        assert_eq!(table.remove(first).expect_err("twice").status, CUDA_IPC_ERR_STALE_HANDLE);
        let third = table.insert(Arc::new(3)).expect("room");
        assert_ne!(first, third);
        assert_eq!((*table.get(third).expect("there"), stale(first)), (3, CUDA_IPC_ERR_STALE_HANDLE));
        assert_eq!(stale(third + (7 << 37)), CUDA_IPC_ERR_HANDLE, "a place that was never used");
        assert_eq!(table.remove_all(|&number| number > 2).len(), 1);
        assert_eq!((table.count(|_| true), stale(third)), (1, CUDA_IPC_ERR_STALE_HANDLE));
    }
}
